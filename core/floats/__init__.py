"""Conversions between float formats with numpy, without torch.

Here: the formats that Penstock converts, and arithmetic that gives the same bits on every machine.
Not here: the callers; codecs use it through `core.abc`. It imports no other package of Penstock.
"""
