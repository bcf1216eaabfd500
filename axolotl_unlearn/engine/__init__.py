"""From a batch to values with gradients: one forward over forget and retain rows, no Trainer."""
