"""sparsity_lab: how much of the dense attention does a cheap selection keep, and at what cost?"""

__version__ = "0.1.0"
