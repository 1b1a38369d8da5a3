"""From a model and a plan to what a rank runs: the outline, units and stages, and what they hold."""
