"""What is known of cards and models without having them: data files, extended by the user's own."""
