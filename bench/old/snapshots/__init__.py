"""`turnkeep bench snapshots`: what snapshots cost running answers, on a good disk and on bad ones."""
