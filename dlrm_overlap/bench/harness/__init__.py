"""What figures share: the workload, the contenders, whether they agree, how long they take, and what limits them."""
