"""distill: cut, train and measure draft models for speculative decoding."""

__version__ = "0.1.0"
