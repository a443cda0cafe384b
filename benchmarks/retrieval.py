"""Fifty questions and their answers, written for this demo: a retrieval task small enough for two cores.

Each topic has several pairs, so that the wrong passages are near misses and not just other subjects.
"""

PAIRS: tuple[tuple[str, str], ...] = (
    # The sky
    ("Why does the moon show phases?", "As the moon circles us, we see a changing share of its sunlit half."),
    (
        "What causes the tides of the sea?",
        "The pull of the moon, and less that of the sun, raises the oceans twice a day.",
    ),
    ("How do stars make their light?", "Deep inside, hydrogen fuses into helium, and the released energy shines out."),
    (
        "What is left when a huge star explodes?",
        "After a supernova the core collapses into a neutron star or a black hole.",
    ),
    ("Why do comets have tails?", "Near the sun their ice turns to gas and dust that the solar wind blows away."),
    # Animals
    (
        "How do bats find their way in the dark?",
        "They send out high calls and listen for the echo from walls and insects.",
    ),
    ("Why do birds fly in a V?", "Each one rides on the rising air from the wing of the neighbour in front."),
    (
        "How do bees tell each other about flowers?",
        "A forager dances on the comb, and the angle shows the direction of the nectar.",
    ),
    ("What do whales eat?", "The largest ones filter tiny krill from the water through plates of baleen."),
    (
        "How does a chameleon change its colour?",
        "Crystals in its skin shift their spacing and so reflect other wavelengths.",
    ),
    # The body
    ("What does the heart do?", "A fist-sized muscle pumps blood through the lungs and around the body."),
    ("Why do we need sleep?", "At night the brain stores memories and clears away waste products."),
    (
        "How do vaccines protect people?",
        "They show the immune system a harmless piece of a germ so that it can remember it.",
    ),
    ("What makes blood red?", "Haemoglobin, a protein with iron that carries oxygen, gives it its colour."),
    ("How does the eye focus?", "A small ring of muscle bends the lens until the image on the retina is sharp."),
    # Cooking
    ("How do I keep pasta from sticking?", "Use plenty of boiling water and stir during the first minute."),
    ("Why does bread rise?", "Yeast eats sugar and fills the dough with bubbles of carbon dioxide."),
    (
        "How can I save a soup that is too salty?",
        "Dilute it with unsalted stock, or add cream, potatoes or a little acid.",
    ),
    ("What makes an onion sting the eyes?", "Cutting it frees a sulphur gas that turns into a mild acid in tears."),
    ("How long should an egg boil to be soft?", "Six minutes from cold to simmering water leave the yolk still runny."),
    # Computers
    ("What does a compiler do?", "It translates a program from the language people write into machine code."),
    ("Why is my laptop so slow?", "Too many programs at once fill the memory, and the system swaps to disk."),
    ("How does a hash table find a key?", "The key is turned into a number that says in which bucket to look."),
    ("What is a good password?", "Several random words in a row are long, hard to guess and easy to remember."),
    ("How do neural networks learn?", "Gradients of the error tell each weight in which direction it should move."),
    # History
    (
        "When did the Berlin Wall fall?",
        "In November 1989 the border between the two parts of the German city was opened.",
    ),
    ("Who built the pyramids of Giza?", "Paid Egyptian workers raised the tombs for their pharaohs around 2500 BC."),
    (
        "What started the First World War?",
        "In 1914 the murder of an archduke in Sarajevo set off a chain of alliances.",
    ),
    (
        "Why did Rome's empire in the west end?",
        "Civil wars, lost taxes and invasions wore it down until the last emperor fell in 476.",
    ),
    (
        "Who invented printing with movable type?",
        "Bi Sheng made it of clay in China; Gutenberg cast it in metal four centuries later.",
    ),
    # Earth
    ("What causes an earthquake?", "Plates of rock that were stuck slip suddenly and shake the ground."),
    ("How does a volcano erupt?", "Gas in rising magma expands and drives lava and ash out of the vent."),
    ("Why is the sky blue?", "Air scatters short wavelengths of sunlight more than long ones."),
    ("How do hurricanes form?", "Warm ocean water feeds rising moist air that begins to rotate."),
    ("Why is the sea salty?", "Rivers carry dissolved minerals there, the water evaporates and they remain."),
    # Money
    ("What is inflation?", "Prices rise across the whole economy, so the same coin buys less."),
    ("How does compound interest work?", "Each year you also earn on what you earned in the years before."),
    ("What is a share of a company?", "Its owner holds a small part of a firm and may receive a part of the profit."),
    ("How can I spend less each month?", "Write down every expense, cancel what you do not use and set a budget."),
    ("Why do people buy insurance?", "A small regular payment protects them against a rare but ruinous loss."),
    # Music
    ("How does a violin make its sound?", "The bow makes a string stick and slip, and the wooden body amplifies it."),
    ("Who composed the Ninth Symphony with the Ode to Joy?", "Beethoven was already deaf when he finished it in 1824."),
    ("What is a chord?", "Three or more notes that sound at the same time."),
    ("How can I learn to play the piano?", "Practise slowly for a short time every day, first each hand alone."),
    (
        "What is the difference between jazz and blues?",
        "One grew from the other and adds swing, richer harmony and long improvisation.",
    ),
    # Travel
    ("How do I get over jet lag?", "Go out into the daylight and take on the local meal and bed times at once."),
    (
        "What should I pack for a hike in the mountains?",
        "Take water, a map, warm layers and a jacket against the rain.",
    ),
    (
        "When is the best time to see the northern lights?",
        "Clear dark nights from September to March in the far north are your best chance.",
    ),
    (
        "How can I travel across Europe cheaply?",
        "Night trains and buses booked early cost less than a flight and a hotel.",
    ),
    (
        "Do I need a visa for a short holiday?",
        "It depends on your passport: ask the embassy of the country before you book.",
    ),
)
"""(question, the passage that answers it); about a hundred sentences of 5 to 22 tokens."""
