"""The event loop's side of the device: where KV is, which turn may start, and who keeps KV on the device."""
