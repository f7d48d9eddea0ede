"""The engines that run in this process: sequences, their scheduler, keys and values, and the thread that writes."""
