"""olq_fx: online quantization of any PyTorch model, as a torch.compile graph-rewriting pass."""

__version__ = "0.1.0"
