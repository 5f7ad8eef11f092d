"""The provider of plain Python values: as JSON, bit by bit, or pickled where that is allowed.

Here: encoding, and decoding that trusts nothing. Not here: containers of objects, which core walks.
"""

from penstock.providers.values.value import ValueProvider

__all__ = ["ValueProvider"]
