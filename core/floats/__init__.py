"""Conversions between float formats, with numpy alone, without torch.

Here: the formats that Penstock converts, and arithmetic that gives the same bits on every machine.
Not here: the callers; codecs reach it through `core.abc`. It imports nothing else of Penstock.
"""
