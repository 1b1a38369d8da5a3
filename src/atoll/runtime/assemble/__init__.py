"""Build the outline, units and stages of a rank from a model and a plan, and count their memory."""
