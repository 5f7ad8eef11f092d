"""When saves are due: measuring steps and saves, choosing the interval, agreeing on the step.

Not here: how a save runs (`save`), and which checkpoints stay (`catalog`).
"""
