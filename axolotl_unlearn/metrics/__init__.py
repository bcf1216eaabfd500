"""Pure functions of numbers and texts: no model, no file, no Trainer."""
