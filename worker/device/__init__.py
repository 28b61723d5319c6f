"""The device: what runs there when, what stays there, and whether it fits."""
