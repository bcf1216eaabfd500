"""What runs and merges look like from inside: task vectors, directions, sweeps, trajectories.

geometry    cosine of task vectors, sign conflicts per layer, angles between update directions
sweep       scores over density, method, scale, and along an interpolation path
trajectory  scores and losses along the checkpoints of a run
figures     the same as matplotlib figures
"""
