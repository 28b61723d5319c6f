"""Files: the directory, the format of a snapshot, and the threads that write and read them."""
