"""One mechanism for all 27 layouts."""
