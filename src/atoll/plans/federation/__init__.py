"""Islands that come and go: which outer gradients a round counts, agreed without a host that all depend on."""
