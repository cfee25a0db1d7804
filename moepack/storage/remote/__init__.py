"""Files that are elsewhere: objects in stores, files of web servers and of the hub.

It knows addresses, ranges and retries, and nothing of models or packs. A call that reads ends at a
signal, or with the pool of its thread; one that writes is waited for. obstore does the transfers
(the extra `remote`). It hangs in a forked child, so processes that use it are spawned. As measured:
a range beyond the end comes back short without an error, it retries 408, 429 and 5xx but never 403,
and it ignores Retry-After.
"""
