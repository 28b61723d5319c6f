"""What goes over the wire: messages, subjects, error codes, the client and the AsyncAPI document.

Imports neither `worker` nor `cache`, so that it can be published alone as the client.
"""
