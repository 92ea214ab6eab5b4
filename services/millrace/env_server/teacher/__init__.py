"""The teacher of a distillation: asked, checked, and its scores written."""
