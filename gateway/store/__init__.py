"""Where reservations and bookings are agreed: in memory, or in a shared Redis or Valkey."""
