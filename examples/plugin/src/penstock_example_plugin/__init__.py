"""A backend, a codec and a provider for Penstock, as a third party would ship them."""
