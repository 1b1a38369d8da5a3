"""What is decided before anything runs: orders of actions, layouts, meshes, stages, outer steps."""
