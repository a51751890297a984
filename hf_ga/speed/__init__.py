"""Speed-ups as hooks around the forward; each file stands alone and could be deleted."""
