"""`torch.tpu`: what PyTorch expects of a device module, and what tensors need outside of ops."""
