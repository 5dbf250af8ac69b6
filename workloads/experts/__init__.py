"""Expert parallel steps: mixtures of experts, their routes and their traffic."""
