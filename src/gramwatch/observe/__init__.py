"""One forward pass for all detectors: what they need, the plan, the observation, and CUDA graphs."""
