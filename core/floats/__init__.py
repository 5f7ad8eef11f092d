"""Conversions between float formats with numpy, without torch.

Covers the formats that Penstock converts, and arithmetic that gives the same bits on every machine.
Codecs use it through `core.abc`. It imports no other package of Penstock.
"""
