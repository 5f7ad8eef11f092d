"""Conversions between float formats, with numpy alone, so that nothing here needs torch.

Here: which formats Penstock converts, and the arithmetic, to the bit the same on every machine.
Not here: who wants a conversion; codecs reach it through `core.abc`. It imports nothing of the
house.
"""
