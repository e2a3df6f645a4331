// An example text that shows forgetting well: names occur at the beginning and again at the end, with more than a thousand bytes of words
// between them that are not needed again.

const EXAMPLE = [
  "Zebulon Quirke came from Egypt in 1847, and he was the first keeper of the lighthouse at Pembroke.",
  "It was not much of a place. There was a room below, and there was a room above, and there was a stair that went up " +
  "from the one to the other; and when the wind was in the west the rain came in at the door, and when it was in the east " +
  "it came in at the window. He did not mind it. He had a fire, and he had a chair, and he had all the time that there " +
  "is. He would sit there for the whole of the day and look out at the sea, and it was always the same and it was never " +
  "the same, and in the end it was all one to him. In the night he went up the stair and lit the lamp, and in the morning " +
  "he went up again and put it out.",
  "So the years went by. Now and then there came a boat from the town with bread and with oil, and the man in the boat " +
  "would call out to him to ask how he was, and he would call back that he was as well as he had been before. Then the " +
  "man would say that it was going to be a hard winter, or that it had been a hard one, and he would go away again, and " +
  "that was that. There was nothing to be said and there was no one to say it to. He could have gone somewhere else, and " +
  "he often thought of it; but when he had thought of it for a while it was time to go up and see to the lamp, and after " +
  "that he did not think of it any more until the next day, and by then it did not seem to be worth the trouble.",
  "It was many years later that a letter was found in the wall of the house, and it was in a hand that no one in the town " +
  "could read. They sent it to the college, and the college sent it back, and with it there was a note that said who had " +
  "written it. It was signed by Zebulon Quirke, and it was about the lighthouse at Pembroke, and he had never sent it " +
  "home to Egypt.",
].join("\n\n");

// The changed text that a comparison begins with: one name is replaced by a common word.
const EXAMPLE_CHANGED = EXAMPLE.replace("lighthouse at Pembroke", "lighthouse at sea");
