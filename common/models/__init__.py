"""Models: their interface (`text_model`), where they come from (`loading`, `builtin`), and one at work (`learner`)."""
