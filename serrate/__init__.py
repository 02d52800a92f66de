"""A ragged-tensor compiler for PyTorch."""

__version__ = "0.1.0"
