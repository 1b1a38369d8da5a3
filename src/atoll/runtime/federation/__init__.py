"""The exchange between islands that are worlds of their own."""
