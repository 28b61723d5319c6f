"""What is stored, and who has the room. Belongs to the event loop, which never waits for the disk here."""
