"""The device: the PJRT client, the chips it may find, and the processes that share one client."""
