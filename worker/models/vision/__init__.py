"""What a model that sees needs besides its language model: image files, processors, towers."""
