"""Models under names of the user's own, before the engines that serve them."""
