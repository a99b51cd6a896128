"""Every figure of the project; `sparsity_lab.plot` is its public face."""
