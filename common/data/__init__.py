"""Texts: tasks that bring them, the parts a run cuts them into, and who gets which."""
