"""Local Bayesian influence function: sampler, covariance, chain diagnostics, and the method itself."""
