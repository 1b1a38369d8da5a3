"""What executes a plan on torch.distributed."""
