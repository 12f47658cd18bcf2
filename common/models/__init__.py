"""Models: their interface (`text_model`), their sources (`loading`, `builtin`), and training (`learner`)."""
