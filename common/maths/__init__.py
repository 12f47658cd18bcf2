"""Pure functions of tensors, each named as in its paper."""
