"""What each kind of data brings to an experiment: its model, its loss, its rows, and how its runs are judged."""
