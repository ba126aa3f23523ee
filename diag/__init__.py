"""Precision debugging for TensorRT."""

__version__ = "0.1.0"
