"""A backend, a codec, a provider and a replayer for Penstock, as a third party would ship them."""
