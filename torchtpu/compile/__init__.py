"""torch.compile: the backend, traced graphs, FlexAttention and portable artifacts."""
