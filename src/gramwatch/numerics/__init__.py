"""The numbers of the method, as pure functions of tensors: Eq. 1-5, their fast kernels, and metrics."""
