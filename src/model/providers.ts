/** A vendor reached through its AI SDK package, which the user installs. */
export interface ProviderPackage {
  package: string;
  /** What to install: the major release that goes with AI SDK 7 (older ones are adapted). */
  install: string;
  /** Factory that takes `{ apiKey, fetch }` and gives a function from a model's name to a model. */
  factory: string;
  /** Environment variable of the key. */
  keyName: string;
}

export const PROVIDER_PACKAGES: Readonly<Record<string, ProviderPackage>> = {
  anthropic: {
    package: '@ai-sdk/anthropic',
    install: '@ai-sdk/anthropic@4',
    factory: 'createAnthropic',
    keyName: 'ANTHROPIC_API_KEY',
  },
  deepseek: {
    package: '@ai-sdk/deepseek',
    install: '@ai-sdk/deepseek@3',
    factory: 'createDeepSeek',
    keyName: 'DEEPSEEK_API_KEY',
  },
  google: {
    package: '@ai-sdk/google',
    install: '@ai-sdk/google@4',
    factory: 'createGoogleGenerativeAI',
    keyName: 'GOOGLE_GENERATIVE_AI_API_KEY',
  },
  groq: {
    package: '@ai-sdk/groq',
    install: '@ai-sdk/groq@4',
    factory: 'createGroq',
    keyName: 'GROQ_API_KEY',
  },
  mistral: {
    package: '@ai-sdk/mistral',
    install: '@ai-sdk/mistral@4',
    factory: 'createMistral',
    keyName: 'MISTRAL_API_KEY',
  },
  openai: {
    package: '@ai-sdk/openai',
    install: '@ai-sdk/openai@4',
    factory: 'createOpenAI',
    keyName: 'OPENAI_API_KEY',
  },
  openrouter: {
    package: '@openrouter/ai-sdk-provider',
    install: '@openrouter/ai-sdk-provider@3',
    factory: 'createOpenRouter',
    keyName: 'OPENROUTER_API_KEY',
  },
  xai: {
    package: '@ai-sdk/xai',
    install: '@ai-sdk/xai@5',
    factory: 'createXai',
    keyName: 'XAI_API_KEY',
  },
};

/** Servers of open weights and where they listen unless told otherwise. All speak chat completions. */
export const LOCAL_SERVERS: Readonly<Record<string, string>> = {
  'llama-server': 'http://127.0.0.1:8080/v1',
  'lm-studio': 'http://127.0.0.1:1234/v1',
  ollama: 'http://127.0.0.1:11434/v1',
  vllm: 'http://127.0.0.1:8000/v1',
};
