"""AdaFD: the method, and the language model that LLMWC asks for weights."""

from fedstill.strategies.adafd.method import AdaFD, AdaFDParams

__all__ = ["AdaFD", "AdaFDParams"]
