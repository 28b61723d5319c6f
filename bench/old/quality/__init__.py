"""`turnkeep bench quality`: what KV in fewer bits costs in the model's answers."""
